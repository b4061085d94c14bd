//! What programs ask and show: values of flags and the device; tables, curves, progress and memory.

mod device;
mod memory;
pub mod plot;
pub mod progress;
pub mod report;
pub(crate) mod table_picture;
pub mod values;

pub use device::DeviceKind;
pub use memory::Peak;
