"""Hot rows, after P2RES: `recjax study hot_rows`."""
