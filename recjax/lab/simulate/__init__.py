"""Simulates collectives and training iterations on networks that one does not own.

Three layers, after Rashidi et al. (ASTRA-SIM, ISPASS 2020; HOTI 2020), each with one idea:

    workload   what a rank computes and which collectives it issues: `workload`, `dlrm`, `astra_text`
    system     how a collective becomes messages, and in which order chunks go: `collectives`, `system`, `execution`
    network    which links a message takes and when each is free: `topology`, `lower`, `engine`, `tcp`, `compiled`

A ring all-reduce on `switch:8` on its way through them: `collectives` writes it as 14 steps, in each of which every
rank sends M/8 to the next one and waits for as much. `lower` turns the sends into links of this network (uplink of the
sender, downlink of the receiver) and times in ticks. `execution` cuts the operation into chunks and admits them rank by
rank. `engine` plays the messages: each link serves one at a time, in the order of arrival. Where every rank sees the
same, `lower` plays one rank for all. `compiled` is `engine` and `tcp` once more, in the C++ of the optional kernels.

Nothing here needs JAX or a device.
"""
