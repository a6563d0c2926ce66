"""`kubectl stasis`: what a user asks of suspended, checkpointed and resumed TrainJobs, with the user's own rights."""
