"""What a model would do on GPUs that are not here: the scheduler against a clock of costs."""
