//! The `aenv.*` parameters of the kernel command line.

use std::net::Ipv4Addr;

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    pub address: Option<Address>,
    pub gateway: Option<Ipv4Addr>,
    pub mtu: Option<u16>,
    pub dns: Vec<Ipv4Addr>,
    pub root: Option<String>,
    pub modules: Option<String>,
    pub hostname: Option<String>,
}

/// An address with the length of its prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    pub ip: Ipv4Addr,
    pub prefix: u8,
}

impl Address {
    pub fn netmask(self) -> Ipv4Addr {
        Ipv4Addr::from(
            u32::MAX
                .checked_shl(32 - u32::from(self.prefix))
                .unwrap_or(0),
        )
    }
}

/// Reads the command line. Parameters of others are ignored, wrong ones of ours are an error.
pub fn parse(line: &str) -> Result<Parameters, String> {
    let mut parameters = Parameters::default();
    for word in line.split_ascii_whitespace() {
        let Some((key, value)) = word.strip_prefix("aenv.").and_then(|w| w.split_once('=')) else {
            continue;
        };
        let wrong = |what: &str| format!("kernel parameter {word}: expected {what}");
        match key {
            "ip" => {
                parameters.address = Some(address(value).ok_or_else(|| wrong("ADDRESS/PREFIX"))?)
            }
            "gw" => parameters.gateway = Some(value.parse().map_err(|_| wrong("an IPv4 address"))?),
            "mtu" => parameters.mtu = Some(value.parse().map_err(|_| wrong("a number of bytes"))?),
            "dns" => {
                let servers = value.split(',').filter(|s| !s.is_empty()).map(str::parse);
                parameters.dns = servers
                    .collect::<Result<_, _>>()
                    .map_err(|_| wrong("IPv4 addresses"))?;
            }
            "root" => parameters.root = Some(device(value).ok_or_else(|| wrong("a path in /dev"))?),
            "modules" => {
                parameters.modules = Some(device(value).ok_or_else(|| wrong("a path in /dev"))?)
            }
            "hostname" => parameters.hostname = Some(value.to_owned()),
            _ => {}
        }
    }
    Ok(parameters)
}

fn address(value: &str) -> Option<Address> {
    let (ip, prefix) = value.split_once('/')?;
    let address = Address {
        ip: ip.parse().ok()?,
        prefix: prefix.parse().ok()?,
    };
    (address.prefix <= 32).then_some(address)
}

fn device(value: &str) -> Option<String> {
    let name = value.strip_prefix("/dev/")?;
    (!name.is_empty() && !name.contains("..")).then(|| value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn all_parameters_are_read() {
        let line = "console=ttyS0 quiet aenv.ip=169.254.0.21/30 aenv.gw=169.254.0.22 aenv.mtu=1400 \
            aenv.dns=1.1.1.1,8.8.8.8 aenv.root=/dev/vda aenv.modules=/dev/vdb aenv.hostname=box aenv.new=1\n";
        let got = parse(line).unwrap();
        assert_eq!(
            got.address.unwrap().netmask(),
            Ipv4Addr::new(255, 255, 255, 252)
        );
        assert_eq!(got.gateway, Some(Ipv4Addr::new(169, 254, 0, 22)));
        assert_eq!((got.mtu, got.dns.len()), (Some(1400), 2));
        assert_eq!(
            (got.root.as_deref(), got.modules.as_deref()),
            (Some("/dev/vda"), Some("/dev/vdb"))
        );
        assert_eq!(got.hostname.as_deref(), Some("box"));
        assert_eq!(parse("").unwrap(), Parameters::default());
    }

    #[test]
    fn wrong_values_are_named() {
        for word in [
            "aenv.ip=1.2.3.4",
            "aenv.ip=1.2.3.4/33",
            "aenv.mtu=x",
            "aenv.dns=a",
            "aenv.root=vda",
            "aenv.root=/dev/../x",
        ] {
            assert!(parse(word).unwrap_err().contains(word));
        }
    }

    proptest! {
        #[test]
        fn netmasks_have_prefix_bits(prefix in 0u8..=32) {
            let mask = Address { ip: Ipv4Addr::LOCALHOST, prefix }.netmask();
            prop_assert_eq!(u32::from(mask).leading_ones(), u32::from(prefix));
            prop_assert_eq!(u32::from(mask).count_ones(), u32::from(prefix));
        }
    }
}
