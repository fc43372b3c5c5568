"""From recipe and facts to the plan: pure functions, no processes, no environment, no clock."""
