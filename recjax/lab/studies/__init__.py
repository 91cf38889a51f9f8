"""Published studies, done again: `recjax study NAME` trains, measures, and draws the figures."""
