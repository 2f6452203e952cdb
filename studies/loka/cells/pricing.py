"""Cells of prices and plans: studies.loka.measures.pricing with the metrics that the study declares (studies.loka.declared)."""

from studies.loka.declared import kept
from studies.loka.measures import pricing as pricing_cells

__all__ = ["flips", "gradients", "planners", "trained"]

trained = kept(pricing_cells.trained, "log_loss", "bayes_log_loss")
flips = kept(pricing_cells.flips, "log_loss", "points", "rank_correlation", "slope")
gradients = kept(pricing_cells.gradients, "gradient_bias")
planners = kept(pricing_cells.planners, "plan_speedup", "plan_loss_change")
