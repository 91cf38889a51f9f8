"""What a trained model is used for: scores of rows that it has not seen."""
