"""Generated click data: with a planted signal, or a stream to measure speed on."""
