"""Lightning: the Trainer's state around its loop, its loaders' positions, and its checkpoint paths. Loaded by
`tenuto.lightning`."""
