//! The functions of the emulated driver that no other driver has.

use std::ffi::{c_int, c_long, CStr};

use crate::needs::EMULATED_DRIVER;

pub struct Driver {
    fail_call: extern "C" fn(c_long),
    failure_is_pending: extern "C" fn() -> c_int,
    live_allocations: extern "C" fn() -> c_long,
    keep_allocations: extern "C" fn(c_int),
    uploads: extern "C" fn() -> c_long,
    waits: extern "C" fn() -> c_long,
}

impl Driver {
    /// The emulated driver; `None` on a GPU, which a line says.
    pub fn emulated() -> Option<Self> {
        let driver = Self::find();
        if driver.is_none() {
            EMULATED_DRIVER.is_missing("the driver is that of a GPU");
        }
        driver
    }

    fn find() -> Option<Self> {
        // SAFETY: the emulated driver defines these functions with these types.
        unsafe {
            Some(Driver {
                fail_call: function(c"emulated_fail_call")?,
                failure_is_pending: function(c"emulated_failure_is_pending")?,
                live_allocations: function(c"emulated_live_allocations")?,
                keep_allocations: function(c"emulated_keep_allocations")?,
                uploads: function(c"emulated_uploads")?,
                waits: function(c"emulated_waits")?,
            })
        }
    }

    /// Makes the n-th call of the driver from now on, on this thread, return an error; with zero, none.
    pub fn fail_call(&self, n: usize) {
        (self.fail_call)(n as c_long)
    }

    /// Returns whether the call that was to fail has not come, and lets none fail any more.
    pub fn take_pending_failure(&self) -> bool {
        let pending = (self.failure_is_pending)() != 0;
        self.fail_call(0);
        pending
    }

    /// The number of allocations of this thread that are not freed.
    pub fn live_allocations(&self) -> i64 {
        (self.live_allocations)()
    }

    /// Lets the allocations that this thread makes from now on live until the process ends.
    pub fn keep_allocations(&self) {
        (self.keep_allocations)(1)
    }

    /// The number of this thread's copies from the host to the device.
    pub fn uploads(&self) -> i64 {
        (self.uploads)()
    }

    /// The number of calls in which this thread has waited for the device.
    pub fn waits(&self) -> i64 {
        (self.waits)()
    }
}

/// Returns the function of this name, if the driver has it.
///
/// # Safety
///
/// `F` must be the type of that function.
unsafe fn function<F>(name: &CStr) -> Option<F> {
    // SAFETY: the name ends with a null byte; a pointer to a function is as large as any other, and null is `None`.
    unsafe { std::mem::transmute_copy::<*mut libc::c_void, Option<F>>(&libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr())) }
}
