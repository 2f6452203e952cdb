"""Many LoRA fine-tunings at once on one frozen base, searched by Optuna."""
