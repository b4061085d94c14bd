//! The functions of the emulated driver that no other driver has.

use std::ffi::{c_int, c_long, CStr};

pub struct Driver {
    fail_call: extern "C" fn(c_long),
    failure_is_pending: extern "C" fn() -> c_int,
    live_allocations: extern "C" fn() -> c_long,
}

impl Driver {
    /// `None` on a GPU.
    pub fn emulated() -> Option<Self> {
        // SAFETY: the emulated driver defines these functions with these types.
        unsafe {
            let driver = Driver {
                fail_call: std::mem::transmute::<*mut libc::c_void, Option<_>>(symbol(c"emulated_fail_call"))?,
                failure_is_pending: std::mem::transmute::<*mut libc::c_void, Option<_>>(symbol(
                    c"emulated_failure_is_pending",
                ))?,
                live_allocations: std::mem::transmute::<*mut libc::c_void, Option<_>>(symbol(
                    c"emulated_live_allocations",
                ))?,
            };
            Some(driver)
        }
    }

    /// Makes the n-th call of the driver from now on, on this thread, return an error.
    pub fn fail_call(&self, n: usize) {
        (self.fail_call)(n as c_long)
    }

    /// Whether that call has not come; none fails any more.
    pub fn take_pending_failure(&self) -> bool {
        let pending = (self.failure_is_pending)() != 0;
        self.fail_call(0);
        pending
    }

    /// The allocations of this thread that are not freed.
    pub fn live_allocations(&self) -> i64 {
        (self.live_allocations)()
    }
}

fn symbol(name: &CStr) -> *mut libc::c_void {
    // SAFETY: the name ends with a null byte.
    unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
}
