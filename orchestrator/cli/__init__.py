"""The command line: `main` parses, each command is a module of its own."""
