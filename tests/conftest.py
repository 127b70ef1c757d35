pytest_plugins = ["suite"]
