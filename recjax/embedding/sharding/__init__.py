"""One file for each way to spread a buffer over devices."""
