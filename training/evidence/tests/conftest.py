from report_lines import results  # noqa: F401 (a fixture)


pytest_plugins = ["suite"]
