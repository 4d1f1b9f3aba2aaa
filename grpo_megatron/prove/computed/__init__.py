"""What trainer ranks compute for a part. Imported in ranks only: Megatron looks at the machine."""
