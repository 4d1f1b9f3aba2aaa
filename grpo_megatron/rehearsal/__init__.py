"""A dress rehearsal: any recipe or graph, run whole on the machine at hand before it is queued."""
