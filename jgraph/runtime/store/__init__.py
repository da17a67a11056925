"""Variables and tables of a task: values, versions, locks, change log."""
