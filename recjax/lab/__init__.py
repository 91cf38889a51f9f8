"""The lab: measures, predicts, records, replays and simulates; a training enters nothing of it."""
