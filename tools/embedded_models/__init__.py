"""How the embedded checkpoints were made: the training text, the training and the measured cards."""
