//! The kernels' arguments as Metal binds them: one by one, in the order of the parameters in `mixture.metal`.

use crate::backend::gpu::arguments::Argument;

/// What is bound to one parameter of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::backend) enum Binding {
    /// The address of memory that the kernel reads.
    Read(u64),
    /// The address of memory that the kernel writes and may also read.
    Write(u64),
    /// No memory, as the bits of the kernel's last parameter say.
    Absent,
    /// The bytes of a number or of a structure of numbers.
    Bytes(Vec<u8>),
}

/// Returns the bindings of all parameters of a kernel with these arguments. The last one has a bit for each of the
/// others, which says whether the parameter is present.
pub(in crate::backend) fn bindings(arguments: &[Argument]) -> Vec<Binding> {
    let read = |address| if address == 0 { Binding::Absent } else { Binding::Read(address) };
    let write = |address| if address == 0 { Binding::Absent } else { Binding::Write(address) };
    let mut bindings = Vec::new();
    for argument in arguments {
        match argument {
            Argument::Logits(x) => bindings.extend([
                read(x.z),
                read(x.bias),
                numbers(&[
                    &x.stride.to_ne_bytes(),
                    &x.scale.to_ne_bytes(),
                    &x.cap.to_ne_bytes(),
                    &x.function.to_ne_bytes(),
                    &x.vocab.to_ne_bytes(),
                    &x.components.to_ne_bytes(),
                ]),
            ]),
            Argument::Objective(x) => bindings.extend([
                read(x.ids),
                read(x.hard),
                read(x.scales),
                read(x.soft),
                read(x.factor),
                numbers(&[&x.soft_stride.to_ne_bytes(), &x.terms.bytes()]),
            ]),
            Argument::Rows(x) => {
                let count = numbers(&[&x.count.to_ne_bytes()]);
                bindings.extend([read(x.log_priors), read(x.own_logits), write(x.values), count])
            }
            Argument::Scored(x) => bindings.extend([
                read(x.candidates),
                write(x.values),
                numbers(&[
                    &x.stride.to_ne_bytes(),
                    &x.power.to_ne_bytes(),
                    &x.count.to_ne_bytes(),
                    &x.needs.to_ne_bytes(),
                ]),
            ]),
            Argument::Read(address) => bindings.push(read(*address)),
            Argument::Write(address) => bindings.push(write(*address)),
            Argument::Int(x) => bindings.push(numbers(&[&x.to_ne_bytes()])),
            Argument::Long(x) => bindings.push(numbers(&[&x.to_ne_bytes()])),
            Argument::Float(x) => bindings.push(numbers(&[&x.to_ne_bytes()])),
        }
    }
    let bit = |(i, binding): (usize, &Binding)| u32::from(*binding != Binding::Absent) << i;
    let present: u32 = bindings.iter().enumerate().map(bit).sum();
    bindings.push(numbers(&[&present.to_ne_bytes()]));
    bindings
}

/// Binds the bytes of a number, or of a structure of numbers, padded to its alignment of eight bytes.
fn numbers(parts: &[&[u8]]) -> Binding {
    let mut bytes = parts.concat();
    if parts.len() > 1 {
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }
    Binding::Bytes(bytes)
}
