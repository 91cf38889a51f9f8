"""Quality measures: exact, binned, by slice, and calibration."""
