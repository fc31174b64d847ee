//! Calibration, Hessians, GPTQ, the streaming pipeline and the gates
