"""Training of a pack's hash function (moert.pack.learnt) on routers' choices, and of its predictors of neurons."""
