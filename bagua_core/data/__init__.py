"""How samples reach the training script: shares of a global batch, whoever is in the job."""
