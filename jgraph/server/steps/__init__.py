"""Steps on a task: driver, executor threads, what they wait for."""
