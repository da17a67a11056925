"""Steps: their driver, replica loops, commit tracking, timelines."""
