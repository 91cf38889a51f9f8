"""Routing: from ids to the rows that each device asks of each other one."""
