"""Many runs from one file: what they are, running them, and what came of it."""
