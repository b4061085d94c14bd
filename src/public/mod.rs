//! The modules of the public interface whose types are defined in several places of the crate.
//!
//! `two_level` and `distributed` are public themselves. The root has the names that nearly every program needs.

pub mod decode;
pub mod distill;
mod head_config;
pub mod parts;
pub mod policy;
pub mod sampled;
pub mod score;
pub mod sets;
pub mod trainers;

pub use head_config::HeadConfig;
