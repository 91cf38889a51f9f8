"""Uses of a trained model: scores of rows that it has not seen."""
