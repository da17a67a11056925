"""Calls to a task over a resumable stream: requests, replies, admission."""
