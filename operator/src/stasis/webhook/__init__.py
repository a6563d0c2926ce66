"""The admission webhook: labels what belongs to enabled jobs, gates JobSets, prepares pods. Stateless."""
