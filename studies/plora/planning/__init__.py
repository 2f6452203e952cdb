"""What packs cost and how to plan them: memory and time models, planners, schedules, simulation, regret. Nothing here imports torch."""
