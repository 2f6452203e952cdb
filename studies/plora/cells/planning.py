"""Cells of cost models and planners: studies.plora.measures.planning with the metrics that the study declares (studies.plora.declared)."""

from studies.plora.declared import kept
from studies.plora.measures import planning

__all__ = ["clusters", "cost_model", "gaps", "makespan", "memory_model", "regret"]

cost_model = kept(planning.cost_model, "mape")
memory_model = kept(planning.memory_model, "memory_mape")
gaps = kept(planning.gaps)
regret = kept(planning.regret, "planner_regret")
makespan = kept(planning.makespan, "makespan_s", "makespan_over_eager", "makespan_over_graphed")
clusters = kept(planning.clusters, "simulated_over_sequential")
