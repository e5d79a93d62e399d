pytest_plugins = ["tests.row_plugin"]
