"""The study of Rashidi et al. (HOTI 2020): their DLRM on 128 GPUs, its systems, collectives and transport simulated."""
