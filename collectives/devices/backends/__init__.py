"""How the devices of one process move and combine their tensors: one file a way, all with the interface of `base`."""
