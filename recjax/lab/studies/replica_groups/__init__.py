"""The study of replica groups with tables of their own."""
