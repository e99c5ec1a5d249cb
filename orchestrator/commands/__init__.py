"""One file per sub-command, each with `register(app)`. Everything heavy is imported inside the command's function."""
