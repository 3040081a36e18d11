"""Training of a pack's hash function (moert.pack.hash) on the choices of routers, and of its predictors of neurons."""
