"""What a training step costs on a machine, measured or not: predicted from the compiled program."""
