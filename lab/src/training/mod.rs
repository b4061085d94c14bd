//! Training: `heads` is the loop over the output layers, `session` the training of one of them, `train` one epoch of
//! it, for any `model`; `language_model` is the LSTM of the programs `language_model` and `characters`.

mod awd;
mod flags;
mod generate;
mod grow;
pub mod heads;
mod language_model;
mod learn_table;
mod leg;
mod model;
mod optimizer;
mod ranks;
mod recipe;
mod results;
mod session;
mod sizes;
mod table;
mod train;

pub use awd::Awd;
pub use flags::TrainingFlags;
pub use generate::{generate, SamplingFlags};
pub use language_model::{LanguageModel, TextBatch};
pub use leg::Leg;
pub use model::{Base, Forward, Model, Part, Pass};
pub use optimizer::OptimizerKind;
pub use ranks::Ranks;
pub use recipe::{describe, Recipe, RecipeFlags};
pub use session::Session;
pub use sizes::{InitialValues, Sizes};
pub use table::{TableFlags, TableKind, WORDS_PER_CODE};
pub use train::evaluate;
