//! The glm5_next forward pass, one file per block
