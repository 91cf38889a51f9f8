"""The study of tables larger than memory."""
