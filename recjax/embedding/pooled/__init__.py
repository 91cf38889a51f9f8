"""The exchange of pooled vectors: who holds a table sums its bags, and sends one vector a bag."""
