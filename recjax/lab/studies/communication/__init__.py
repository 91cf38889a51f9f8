"""The study of Chu et al. (Meta): communication of a large DLRM, by size, placement, buckets and precision."""
