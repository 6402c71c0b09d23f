"""What `t5x_fwdloss.analyze` needs from T5X."""
