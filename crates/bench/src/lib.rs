//! Evaluation harness, panels and reports
