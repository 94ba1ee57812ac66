//! `/init` of the guests of the conformance suites. It does what `test=` on the kernel command line says, and reports on
//! the console in lines that begin with `guest:`. Built by `rustc` alone, statically.

mod mailbox;

use std::ffi::{CString, c_char, c_int, c_ulong, c_void};
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

unsafe extern "C" {
    fn mount(
        source: *const c_char,
        target: *const c_char,
        kind: *const c_char,
        flags: c_ulong,
        data: *const c_void,
    ) -> c_int;
    fn reboot(command: c_int) -> c_int;
    fn syscall(number: i64, ...) -> i64;
}

const FINIT_MODULE: i64 = 313;
const POWER_OFF: c_int = 0x4321_FEDC;

fn main() {
    for (kind, target) in [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys")] {
        mount_at(kind, target);
    }
    let line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let test = line.split_whitespace().find_map(|word| word.strip_prefix("test="));
    say("guest: ready");
    match test {
        Some("devices") => {
            load_modules();
            // Discs appear a moment after their driver.
            let deadline = Instant::now() + Duration::from_secs(20);
            while !Path::new("/sys/block/vdb").exists() && Instant::now() < deadline {
                sleep(Duration::from_millis(10));
            }
            say(&format!("guest: devices{}", devices()));
        }
        Some("count") => {
            for number in 0u64.. {
                say(&format!("guest: count {number}"));
                sleep(Duration::from_millis(20));
            }
        }
        Some("flood") => {
            for number in 0u64.. {
                say(&format!("guest: flood {number} {}", "x".repeat(200)));
            }
        }
        Some("poweroff") => power_off(),
        Some("mailbox") => {
            load_modules();
            mailbox::serve(number(&line, "buffer=").unwrap_or(32));
        }
        Some("farewell") => {
            sleep(Duration::from_secs(1));
            power_off();
        }
        // PID 1 must not end.
        Some("panic") => return,
        _ => {}
    }
    loop {
        sleep(Duration::from_secs(3600));
    }
}

fn number(line: &str, name: &str) -> Option<u64> {
    line.split_whitespace().find_map(|word| word.strip_prefix(name))?.parse().ok()
}

fn say(text: &str) {
    if let Ok(mut console) = fs::OpenOptions::new().write(true).open("/dev/console") {
        let _ = console.write_all(format!("{text}\n").as_bytes());
    }
}

fn devices() -> String {
    let mut found = String::new();
    for name in ["vda", "vdb", "vdc", "vdd"] {
        let Ok(size) = fs::read_to_string(format!("/sys/block/{name}/size")) else { continue };
        let read_only = fs::read_to_string(format!("/sys/block/{name}/ro")).unwrap_or_default();
        let access = if read_only.trim() == "1" { "ro" } else { "rw" };
        found += &format!(" {name}={}:{access}:{}", size.trim(), first_bytes(name));
    }
    let mac = fs::read_to_string("/sys/class/net/eth0/address").unwrap_or_default();
    let rng = fs::read_to_string("/sys/class/misc/hw_random/rng_current").unwrap_or_default();
    found + &format!(" eth0={} rng={} end", mac.trim(), rng.trim())
}

/// What is written at the beginning of a disk, up to the first zero.
fn first_bytes(name: &str) -> String {
    use std::io::Read;
    let mut bytes = [0u8; 16];
    if File::open(format!("/dev/{name}")).and_then(|mut disk| disk.read_exact(&mut bytes)).is_err() {
        return "unreadable".into();
    }
    bytes.iter().take_while(|byte| byte.is_ascii_alphanumeric()).map(|byte| char::from(*byte)).collect()
}

fn mount_at(kind: &str, target: &str) {
    let (kind, target) = (CString::new(kind).unwrap(), CString::new(target).unwrap());
    // SAFETY: three C strings that outlive the call, and no data.
    unsafe { mount(kind.as_ptr(), target.as_ptr(), kind.as_ptr(), 0, std::ptr::null()) };
}

fn load_modules() {
    for path in fs::read_to_string("/modules.list").unwrap_or_default().split_whitespace() {
        if let Ok(file) = File::open(path) {
            // SAFETY: finit_module takes a descriptor, a C string and flags.
            unsafe { syscall(FINIT_MODULE, i64::from(file.as_raw_fd()), c"".as_ptr(), 0i64) };
        }
    }
}

fn power_off() -> ! {
    // SAFETY: takes no memory.
    unsafe { reboot(POWER_OFF) };
    unreachable!("the machine is off");
}
