"""The cluster's controller: sees TrainJobs, decides, leads the gang protocol."""
