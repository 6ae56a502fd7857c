"""The command `fedcb2o minimize`: a problem, a recorded run, its summary and figures."""
