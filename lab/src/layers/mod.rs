//! The layers of models: LSTMs, attention and Transformers, dropout, output layers; and their variables, from initial
//! values to checkpoints.

mod attention;
pub(crate) mod checkpoint;
pub mod dropout;
pub mod gguf;
pub(crate) mod head;
pub mod init;
pub mod inplace;
pub mod mixtape;
pub(crate) mod output;
mod recurrence;
mod recurrence_cpu;
pub mod recurrent;
pub mod recurrent_decoder;
pub(crate) mod spelled;
pub mod transformer;

pub use attention::{Attention, Memory};
pub use checkpoint::Checkpoint;
pub use head::{logit_function, HeadKind, HeadSizes};
pub use output::{Entries, Noise, Output, OutputKind};
pub use spelled::CnnSize;
